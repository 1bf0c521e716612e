"""`hvdtrain plan`: calibrate on what one has, predict what one has not. README.md says how the
simulation works.
"""
