"""A double of ``libnvidia-ml.so.1`` in C, scripted by a scenario file.

The test run builds it; no GPU is needed.
The tests exercise pynvml's own loading path: it loads the library by its name in a child process (``child.py``) whose
``LD_LIBRARY_PATH`` begins with the build folder (``build.py``).
"""
