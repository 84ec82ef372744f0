"""The common part of objectives: base classes, options, arithmetic within groups, the clipped
policy gradient.
"""
