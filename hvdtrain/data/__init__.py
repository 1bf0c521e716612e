"""Data sets: image folders, where they come from, and the batches that workers train on.

- Building: `recipe.py` reads `datasets/`, `sources/` has a module for each kind of source,
  `archive.py` and `download.py` read their files, `selection.py` chooses and splits images,
  `build.py` writes the folder.
- Using: `find.py` resolves `--dataset`, `folder.py` lists an image folder, by `names.py`, which
  knows what images are called and what is passed over everywhere; `identity.py` computes
  the `dataset_hash`, `image_side.py` the default side of images, `sampling.py` tells which worker
  trains on which sample at which step, `loader.py` and `augment.py` make batches. `own.py` has data
  that a user's function returns, `synthetic.py` images of noise, and `bad_images.py` finds what
  `--skip-bad` leaves out.
- Packed, in Parquet: `packing.py` writes; `packed.py` lists the data set at a URL through
  `filesystems.py`; `parquet_process.py` is the process that reads files, by `parquet_files.py`;
  `row_groups.py` has the images as training sees them, `held_out.py` splits a training part, and
  `kept_files.py` keeps whole files on a host's disk.
- Looking: `commands.py` is `hvdtrain data`, with `check.py` and `contact_sheet.py`.
- Shared: `image.py` handles one encoded image; `storage.py` has the cache, folders that appear
  complete or not at all, and work on all cores.
"""
