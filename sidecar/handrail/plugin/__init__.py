"""The part of Handrail that runs inside the engine's processes.

It uses the standard library alone and costs the engine nothing noticeable (DESIGN section 9).
"""
