"""The checks of the documentation find what they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import blocks
from tests.docs.blocks import Block, blocks_of, commands_of
from tests.docs.commands import check
from tests.docs.python_blocks import faults_of

IMPORT = "from hybridengine.kernels import gae, policy_loss\n"


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("print(rewards)", "rewards is neither defined nor stated"),
        ("# needs a model\nprint(model, engine)", "engine is neither"),
        ("from hybridengine.kernels import gea", "hybridengine.kernels has no gea"),
        ("import torch\nfrom nowhere import x", "there is no module nowhere"),
        (f"# needs x\n{IMPORT}policy_loss(x, x, x, mode='grpo')", "unexpected keyword"),
        (
            "# needs a store\nfrom hybridengine.remote import servers\nservers.Pool(store)",
            "Pool",
        ),
    ],
)
def test_a_wrong_python_block(code: str, fault: str) -> None:
    assert any(fault in line for line in faults_of(Block("page", 1, "python", code), []))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("make demos", "the Makefile has no demos"),
        ("python examples/nothing.py", "there is no examples/nothing.py"),
        ("python examples/demo/prepare.py --sead 1", "has no --sead"),
        ("python -m benchmarks.nothing", "there is no module"),
        ("hybridengine export runs/x --to y    # needs a run", "No such option"),
        ("hybridengine grpo config.yaml rollout.m=1    # needs 8 GPUs", "rollout.m"),
        ("hybridengine grpo examples/grp.yaml    # needs 8 GPUs", "examples/grp.yaml"),
        pytest.param(  # its data is not there
            "hybridengine grpo examples/grpo/config.yaml", "error: ", marks=pytest.mark.slow
        ),
        ("frobnicate --all", "nothing checks the program frobnicate"),
    ],
)
def test_a_wrong_command(
    text: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(blocks.ROOT / "examples")
    [command] = commands_of(Block("page", 1, "bash", text))
    with pytest.raises(Exception) as caught:
        check(command, tmp_path)
    assert fault in str(caught.value)


def test_blocks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n\n    make demo    # needs time\n\n- item\n\n    more of it\n\n"
        "```bash\n# needs 8 GPUs\nA=1 hybridengine grpo x.yaml \\\n  a=b && make test\n```\n"
    )
    [first, second] = blocks_of("page.md")
    assert [(c.words, c.needs) for c in commands_of(first)] == [(("make", "demo"), "time")]
    job, test = commands_of(second)
    assert (job.words, job.variables) == (("hybridengine", "grpo", "x.yaml", "a=b"), ("A=1",))
    assert job.needs == test.needs == "8 GPUs"
    for text in ("```\ncode\n```\n", "Text\n\n    x = 1\n"):
        page.write_text(text)
        with pytest.raises(ValueError, match=r"page.md:"):
            list(blocks_of("page.md"))
