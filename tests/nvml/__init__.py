"""A ``libnvidia-ml.so.1`` without a GPU, built from C by the test run and scripted by a scenario file.

pynvml's own path is what is tested: it loads the library by its name in a child process (``child.py``) whose ``LD_LIBRARY_PATH``
begins with the folder where it was built (``build.py``).
"""
