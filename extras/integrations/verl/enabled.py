"""Patch verl by being imported.

verl imports the modules that the environment variable VERL_USE_EXTERNAL_MODULES names, in every
process, Ray's workers included.
"""

from hybridengine.integrations.verl import patch

patch()
