"""Read data files, tokenise them with the chat template, and iterate over batches.

files            parquet, Arrow and JSON files → rows
rows             the chat of a row in one form, with its images, tools and loss flags
template         the text of the chat template, and its special tokens
chats            a chat → text, by the chat template
prompts          rows → prompts of RL
conversations    rows → conversations of SFT, with a loss mask over the assistant's turns
cache            tokenised datasets on disk, shared by the ranks of a machine; their batches
"""

from hybridengine.run.errors import DataError
from hybridengine.train.data.cache import PromptLoader, Subset
from hybridengine.train.data.conversations import SFTDataset, SFTSample, check_conversations
from hybridengine.train.data.prompts import PromptDataset, PromptSample, check_prompts

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
