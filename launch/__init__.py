"""Commands and scenarios: ``serve``, ``demo``, ``doctor``."""
