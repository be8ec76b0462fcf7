"""The one exception that is meant for the person at the keyboard."""

from __future__ import annotations


class UserError(Exception):
    """Wrong input or a machine that lacks something: the message says what is wrong, where, and what to do.

    The command line prints it as one line on stderr and exits with code 2. Library callers can catch it.
    """
