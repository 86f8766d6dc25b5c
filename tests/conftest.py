from hypothesis import settings

# A machine that does something else beside must not fail a law.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
