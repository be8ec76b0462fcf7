"""agentropy: entropy-guided reinforcement learning for tool-using language-model agents."""

__version__ = "0.1.0.dev0"
