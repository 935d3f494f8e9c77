"""A tokenizer with one token per whitespace-separated word."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.train.data.rows import TEMPLATE


@pytest.fixture(scope="session")
def tokenizer():
    words = ["<unk>", "user", "system", "assistant", *map(str, range(100))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", chat_template=TEMPLATE
    )
