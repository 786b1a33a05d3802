"""What a person did wrong, in one line."""


class UserError(Exception):
    """Bad input: the command line prints the message as one line and exits with 2."""
