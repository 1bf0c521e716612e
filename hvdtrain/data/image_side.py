"""The default side of training images."""

from concurrent.futures import ThreadPoolExecutor

from hvdtrain.data.folder import ImageFolder
from hvdtrain.data.image import middle_side, open_image, read, skippable
from hvdtrain.data.sampling import packing_order

SAMPLE = 31  # training images whose sizes stand for all


def native_side(data: ImageFolder) -> int:
    """Returns the default side of training images, in pixels.

    It is the side that `data build` has written down, or else the middle_side of SAMPLE images.

    Raises:
        Failure: One of the images cannot be read.
    """
    if data.image_size:
        return data.image_size
    # The images that would be packed first: in a packed set they lie in one row group.
    chosen = packing_order(len(data.train))[:SAMPLE].tolist()
    samples = [data.train[number][0] for number in chosen]
    # Threads, because a network's latencies would add up.
    with skippable(samples[0]), ThreadPoolExecutor(8) as pool:
        contents = list(pool.map(read, samples))
        sides = []
        for content, sample in zip(contents, samples, strict=True):
            image = open_image(content, str(sample))
            sides.append(min(image.size))
        return middle_side(sides)
