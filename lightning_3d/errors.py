"""Every error that this package raises for a user's input or a run's failure."""


class Lightning3DError(Exception):
    """Base of all errors of this package."""


class LayoutError(Lightning3DError, ValueError):
    """Sizes of axes that do not fit each other or the number of processes."""


class ConfigError(Lightning3DError, ValueError):
    """A setting that is unknown, of the wrong type or out of range."""


class ModelError(Lightning3DError, ValueError):
    """A model that cannot be built, split or initialised as asked."""


class DataError(Lightning3DError, ValueError):
    """Data that is missing, empty or does not divide as asked."""


class CheckpointError(Lightning3DError, RuntimeError):
    """A checkpoint that cannot be written or read whole."""


class NumbersError(Lightning3DError, ArithmeticError):
    """A loss or gradient that is not finite, or that comes out otherwise when it is computed again."""


class LaunchError(Lightning3DError, RuntimeError):
    """Processes that cannot be started, or one that ended and took the job with it."""
