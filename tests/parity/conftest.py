"""Examples have no deadline: no test depends on the load of the machine."""

from hypothesis import settings

settings.register_profile("any_load", deadline=None)
settings.load_profile("any_load")
