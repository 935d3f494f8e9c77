"""Mixtures of experts: experts, routers, their replay and balance."""
