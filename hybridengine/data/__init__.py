"""Prompts: files in verl's row schema → token ids, in an order every rank agrees on."""

from hybridengine.data.loader import PromptLoader
from hybridengine.data.prompts import DataError, PromptDataset, PromptSample

__all__ = ["DataError", "PromptDataset", "PromptLoader", "PromptSample"]
