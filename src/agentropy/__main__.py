"""`python -m agentropy`, and so `torchrun -m agentropy`."""

from __future__ import annotations

import sys

from agentropy.cli import main

sys.exit(main())
