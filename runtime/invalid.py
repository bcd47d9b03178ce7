"""The error for a value that the user gave and that cannot be used."""

from moeinf.errors import InvalidInput


class InvalidValue(InvalidInput, ValueError):
    """A value given by the user is invalid. Its text names the option and what is expected."""

    code = "invalid"
