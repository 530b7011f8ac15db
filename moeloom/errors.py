"""The errors that moeloom raises beside `ValueError` (a wrong argument), and their way across ranks."""


class MoeloomError(Exception):
    """Base of every error that is moeloom's own."""


class PeerTimeout(MoeloomError, TimeoutError):
    """A rank did not come in time; the message names operation, rank and phase."""


class CapabilityError(MoeloomError):
    """Something this machine or backend cannot do; the message says what was found and what is needed."""


class CapacityError(MoeloomError):
    """More tokens, rows or bytes than there is room for; the message names need, limit and the setting to change."""


class KernelError(MoeloomError):
    """A kernel that cannot be compiled, loaded or launched; the message holds the compiler's or the driver's words."""


_ERRORS = (MoeloomError, PeerTimeout, CapabilityError, CapacityError, KernelError, ValueError)
_ACROSS_RANKS = {cls.__name__: cls for cls in _ERRORS}


def to_record(error: BaseException) -> dict[str, str]:
    """An error as data that another rank can raise again."""
    name = type(error).__name__
    if name in _ACROSS_RANKS:
        return {"error": name, "message": str(error)}
    return {"error": "MoeloomError", "message": f"{name}: {error}"}


def from_record(record: dict[str, str]) -> Exception:
    """The same error, to be raised on this rank."""
    return _ACROSS_RANKS[record["error"]](record["message"])
