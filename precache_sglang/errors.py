"""Every exception of ours.

PrecacheError
├── SettingsError      a setting is wrong or contradicts another
├── UnsupportedError   an engine option, model or request we cannot serve
├── AdapterError       a LoRA adapter the chosen method cannot serve
└── PatchError         SGLang is not the version we patched, or a hook is missing
"""


class PrecacheError(Exception):
    """Base of all errors raised by this package."""


class SettingsError(PrecacheError, ValueError):
    """A setting is out of range or contradicts another setting."""


class UnsupportedError(PrecacheError, ValueError):
    """An engine option, a model or a request that the method cannot serve."""


class AdapterError(PrecacheError, ValueError):
    """An adapter that the method cannot serve; the message names it and the reason."""


class PatchError(PrecacheError, RuntimeError):
    """The installed SGLang differs from what our hooks were written for."""
