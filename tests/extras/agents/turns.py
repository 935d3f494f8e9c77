"""A multi-turn loop and its tools, as a user's files."""

from __future__ import annotations

# The tiny model writes no JSON: here every turn that is not empty calls both tools.
TURN_LOOP = """
from dataclasses import replace

from hybridengine.agents import ToolCall
from hybridengine.agents.loops import ToolLoop

def parse(text):
    return [ToolCall(name, {"k": k}) for k, name in enumerate(("count", "more"))] if text else []

class Loop(ToolLoop):
    def __init__(self, context):
        super().__init__(replace(context, parse=parse))
"""
TURN_TOOLS = '''
from time import sleep

active, most = 0, 1

def count(k: int) -> str:
    """Count.

    Args:
        k: any
    """
    return f"w{60 + most} w4 w5 w6"

def more(k: int) -> str:
    """Count.

    Args:
        k: any
    """
    return f"w{60 + most} w8 w9"
'''
