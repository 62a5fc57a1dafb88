"""The former name of ``handrail.plugin``. It goes with 0.2."""
