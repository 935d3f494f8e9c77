"""Do what the first call of a process computes and keeps: 0.7 s of CPU for every rank."""

from importlib.metadata import entry_points

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from hybridengine.model.extensions import model_extensions
from hybridengine.run import plugins
from hybridengine.run.config import load_config, load_sft_config

get_checkpoint_conversion_mapping("llama")  # compiles the patterns of all models
for load in (load_config, load_sft_config):  # builds pydantic's schema
    load(None, ["model.path=model", "data.train_files=file"])
for group in entry_points().groups:  # looks through every installed distribution
    if group.startswith("hybridengine."):
        plugins(group.removeprefix("hybridengine."))
model_extensions()  # registers operators
