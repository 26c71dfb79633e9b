"""One small script for each framework, as its documentation writes them, to run beside its face.

They know nothing of unipar. ``measure/speed/faces.py`` runs each as it is, and as ``unipar
migrate`` changes it.
"""
