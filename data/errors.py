"""Errors that are meant for the user, not for a traceback."""


class UserError(ValueError):
    """Something the user can mend: one clear sentence that says what, where and what to do.

    The command line prints the message alone and exits with code 2.
    """
