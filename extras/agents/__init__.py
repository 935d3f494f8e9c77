"""Multi-turn rollouts: trajectories in which the model calls tools or acts in an environment.

runner        many trajectories on one engine, which stays busy
loops         what happens in a trajectory: `AgentLoop`, loops with tools and with environments
trajectory    turns, and the tokens to train on
trajectories  from trajectories to scored responses
template      tokens of new messages, by the chat template
tools         functions and classes as tools
toolbox       the calls of one trajectory
parsers       tool calls in what a model wrote
"""

from hybridengine.agents.loops import AgentLoop, LoopContext, find_loop, register_agent_loop
from hybridengine.agents.parsers import ToolCall, find_parser
from hybridengine.agents.runner import AgentRunner, build_agents, tool_schemas
from hybridengine.agents.template import TurnTemplate
from hybridengine.agents.tools import BaseTool, load_tools
from hybridengine.agents.trajectories import with_turns
from hybridengine.agents.trajectory import AgentError, TokenSequence, Trajectory, Turn

__all__ = [
    "AgentError",
    "AgentLoop",
    "AgentRunner",
    "BaseTool",
    "LoopContext",
    "TokenSequence",
    "ToolCall",
    "Trajectory",
    "Turn",
    "TurnTemplate",
    "build_agents",
    "find_loop",
    "find_parser",
    "load_tools",
    "register_agent_loop",
    "tool_schemas",
    "with_turns",
]
