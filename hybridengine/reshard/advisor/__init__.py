"""The advisor: what a weight sync would cost, before anything is bought."""

from hybridengine.reshard.advisor.advise import Advice, Option, advise
from hybridengine.reshard.advisor.view import draw_advice, print_advice

__all__ = ["Advice", "Option", "advise", "draw_advice", "print_advice"]
