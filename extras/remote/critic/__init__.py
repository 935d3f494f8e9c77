"""The critic of PPO: values and updates, on the ranks of the policy or on ranks of its own."""
