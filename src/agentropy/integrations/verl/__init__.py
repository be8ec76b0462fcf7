"""TAO-RL, TEPO and the rest inside verl's v1 trainer (docs/verl.md). verl finds `plugin` through its entry point.

| module | what is in it | imports verl |
|---|---|---|
| `plugin` | found by verl; registers the trainer when verl loads its own | no |
| `options` | the config group `agentropy`, and what of verl's configuration contradicts it | no |
| `rows` | verl's rows as tasks; trajectories as a row's per-token columns and back | no |
| `policy` | verl's servers as a `Policy` | no |
| `worker` | our agent loop in verl's agent-loop workers, a whole question at a time | yes |
| `groups` | dynamic sampling: replaces questions that the method's filters remove | yes |
| `trainer` | `_compute_advantage` by `Method.shape`, the loss hook | yes |
| `loss` | `Method.compute_loss` in verl's actors | yes |
| `launch` | Hydra overrides and data files for `agentropy launch verl` | no |
"""
