"""Images on their way to a model: decoded, and prepared by the model's own processor.

checks       settings that images are not supported with
decoding     the pixels of an image
encoded      an image as it is stored
engine       prompts with images in vLLM
extension    what the core asks for
formats      how each family of models takes images
packed       images in a packed forward pass
processor    transformers' processor of a checkpoint → the tokens and tensors of an image
rows         the images of a row, and their places in its chat
"""

from hybridengine.vision.encoded import EncodedImage
from hybridengine.vision.processor import ImagePreparer, load_image_preparer

__all__ = ["EncodedImage", "ImagePreparer", "load_image_preparer"]
