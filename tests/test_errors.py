"""Messages of other libraries, in our terms."""

from pathlib import Path

import pytest
import torch

from hybridengine.model.validation import check_model
from hybridengine.run.errors import ModelError, reason_of
from hybridengine.run.failures import one_line
from tests.tiny_models import tiny_config


class Unknown:
    pass


@pytest.mark.parametrize("content", ["code", "garbage"])
def test_no_advice_to_execute_a_file(tmp_path: Path, content: str) -> None:
    file = tmp_path / "weights.pt"
    if content == "code":
        torch.save(Unknown(), file)
    else:
        file.write_bytes(b"\x80\x02garbage")
    with pytest.raises(Exception) as raised:
        torch.load(file, weights_only=True)
    reason = reason_of(raised.value)
    assert "weights_only" not in reason and "Please" not in reason and "\n" not in reason
    assert ("Unknown" in reason) == (content == "code")


def test_own_code_of_a_model_names_our_key(tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    config.model_type = "own"
    config.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('"llama"', '"own"')
    )
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"Set model\.trust_remote_code=true to run it") as raised:
        check_model(str(tmp_path))
    assert "True" not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\nb"), "ValueError: a"),
        (ValueError(), "ValueError: ValueError"),
        (ValueError("\n a\nb"), "ValueError: a"),
    ],
)
def test_one_line_of_an_error(error: Exception, line: str) -> None:
    assert one_line(error) == line
