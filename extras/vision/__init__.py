"""Images on their way to a model: encoded, decoded, and prepared by the model's own processor.

encoded      an image as a data file has it
processor    transformers' processor of a checkpoint → the tokens and tensors of an image
torchvision  what transformers and vLLM import of it where it is not installed
"""

from hybridengine.vision.encoded import EncodedImage
from hybridengine.vision.processor import (
    ImagePreparer,
    Replacement,
    image_parts,
    load_image_preparer,
)

__all__ = [
    "EncodedImage",
    "ImagePreparer",
    "Replacement",
    "image_parts",
    "load_image_preparer",
]
