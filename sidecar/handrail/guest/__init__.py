"""Former name of ``handrail.plugin``; 0.2 removes it."""
