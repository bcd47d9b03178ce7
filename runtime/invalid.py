"""Define the error for an invalid value that the user gave."""

from moeinf.errors import InvalidInput


class InvalidValue(InvalidInput, ValueError):
    """A value given by the user is invalid. The message names the option and what is expected."""

    code = "invalid"
