"""Pure functions on flat tensors: segment entropies, filters, rewards, advantages, losses, log-probabilities in chunks.

Nothing here knows models, tools or files; the only import of ours is `agentropy.batch`. docs/algorithms.md has the
formulas, their sources and their options. Statistics are taken in float64 and handed back in float32.
"""
