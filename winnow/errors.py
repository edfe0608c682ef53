"""The exceptions a caller may see, as one tree. Knows nothing else of the package.

WinnowError
├── RequestError       the request itself is wrong; nothing else is affected
├── CapacityError      right, but it does not fit, or not now
├── UnsupportedError   a model, a machine or an option that this version does not serve
├── CheckpointError    a checkpoint that cannot be read as what it says it is
└── PeerError          another rank or a remote engine failed

A message says what was asked, what is possible, and what to do.
"""


class WinnowError(Exception):
    """Base of every error that is not our own mistake."""


class RequestError(WinnowError):
    """The caller's request is wrong."""


class CapacityError(WinnowError):
    """The request or model does not fit in what there is."""


class UnsupportedError(WinnowError):
    """A model, machine or option that this version does not serve."""


class CheckpointError(WinnowError):
    """A checkpoint that is damaged, incomplete or not understood."""


class PeerError(WinnowError):
    """Another rank or a remote engine failed."""
