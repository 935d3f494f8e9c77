"""Read data files, tokenise them with the chat template, and iterate over batches.

files            parquet and JSON files → rows
chats            a row's chat → text
prompts          rows → prompts of RL
conversations    rows → conversations of SFT, with a loss mask
cache            tokenised datasets on disk, shared by the ranks of a machine
loader           batches in a seeded order that resumes exactly
"""

from hybridengine.data.conversations import SFTDataset, SFTSample, check_conversations
from hybridengine.data.loader import PromptLoader, Subset
from hybridengine.data.prompts import PromptDataset, PromptSample, check_prompts
from hybridengine.errors import DataError

__all__ = [
    "DataError",
    "PromptDataset",
    "PromptLoader",
    "PromptSample",
    "SFTDataset",
    "SFTSample",
    "Subset",
    "check_conversations",
    "check_prompts",
]
