"""Drop-in replacements under the names other packages use."""
