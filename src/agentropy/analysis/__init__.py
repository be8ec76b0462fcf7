"""Which tool calls helped: trajectories of any source, a table with one row a call, and what methods make of them.

from agentropy.analysis import call_effects, decoder, read

effects = call_effects(read("runs/tao-rl-facts"), decoder("runs/tao-rl-facts"))
"""

from agentropy.analysis.decode import decoder
from agentropy.analysis.effects import call_effects
from agentropy.analysis.imports import read

__all__ = ["call_effects", "decoder", "read"]
