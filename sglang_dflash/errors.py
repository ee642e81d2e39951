"""Errors that users can cause, by a flag, a checkpoint or an environment variable."""


class ConfigError(ValueError):
    """A flag, config field or tensor that a user can correct; the message names it and its value."""
