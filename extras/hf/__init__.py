"""The rollout engine `hf`: Hugging Face `generate`."""
