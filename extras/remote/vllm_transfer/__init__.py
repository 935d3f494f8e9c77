"""Weight transfer into plain vLLM servers, as a plugin of vLLM."""
