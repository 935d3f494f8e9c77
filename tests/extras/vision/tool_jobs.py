"""Small GRPO jobs whose tools return images."""

from __future__ import annotations

from pathlib import Path

from tests.extras.vision.vision_jobs import vision_job

__all__ = ["tool_job"]

LOOP = """
from dataclasses import replace
from hybridengine.agents import ToolCall
from hybridengine.agents.loops import ToolLoop

def parse(text):  # the tiny model writes no JSON
    return [ToolCall("look", {"count": 1 + len(text) % 3}), ToolCall("broken", {})]

class Loop(ToolLoop):
    def __init__(self, context):
        super().__init__(replace(context, parse=parse))
"""
TOOLS = '''
from PIL import Image

def look(count: int) -> list:
    """Look again.

    Args:
        count: of columns
    """
    image = Image.new("RGB", (8 * count, 16), (255, 60 * count, 0))
    return [{"type": "image", "image": image}, {"type": "text", "text": "seen"}]

def broken() -> list:
    """Fail to decode."""
    return [{"type": "image", "image": b"no image"}]
'''


def tool_job(folder: Path, **overrides: object) -> list[str]:
    (folder / "loop.py").write_text(LOOP)
    (folder / "tools.py").write_text(TOOLS)
    return vision_job(
        folder,
        **{
            "data.max_response_length": 64,
            "rollout.n": 2,
            "rollout.multi_turn.enable": True,
            "rollout.multi_turn.max_assistant_turns": 3,
            "rollout.multi_turn.max_parallel_calls": 1,
            "rollout.multi_turn.function_tool_path": folder / "tools.py",
            "rollout.agent.default_agent_loop": f"{folder}/loop.py:Loop",
            "trainer.total_training_steps": 2,
            **overrides,
        },
    )
