"""What makes a setting valid: the checks that drafters and engine share."""

import operator

from slipstream._core import ConfigError


def shown(value: object, limit: int = 80) -> str:
    """A value as an error message shows it: its repr, cut to ``limit`` characters.

    Args:
        value: What came.
        limit: Most characters of it.
    """
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def count(name: str, value: object, low: int, high: int) -> int:
    """An integer setting between ``low`` and ``high``.

    Args:
        name: The setting's name, for the message.
        value: What came. Booleans are no counts.
        low: Least value allowed.
        high: Greatest value allowed.

    Raises:
        ConfigError: If it is no integer, or outside.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise ConfigError(f"expected {name} to be an integer between {low} and {high}, got {shown(value)}")
    return number


def optional_count(name: str, value: object, low: int, high: int) -> int | None:
    """As :func:`count`, or ``None`` for the engine's own choice.

    Args:
        name: The setting's name, for the message.
        value: What came.
        low: Least value allowed.
        high: Greatest value allowed.

    Raises:
        ConfigError: If it is neither ``None`` nor an integer, or outside.
    """
    return None if value is None else count(name, value, low, high)


def flag(name: str, value: object) -> bool:
    """A setting that is on or off.

    Args:
        name: The setting's name, for the message.
        value: What came.

    Raises:
        ConfigError: If it is neither ``True`` nor ``False``.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"expected {name} to be True or False, got {shown(value)}")
    return value


def choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuses a setting that is not built.

    Args:
        name: The setting's name, for the message.
        value: What came.
        allowed: What is built.

    Raises:
        ConfigError: If ``value`` is not one of ``allowed``.
    """
    if not any(type(value) is type(item) and value == item for item in allowed):
        expected = " or ".join(repr(item) for item in allowed)
        raise ConfigError(f"{name}={shown(value)} is not supported: expected {expected}")
