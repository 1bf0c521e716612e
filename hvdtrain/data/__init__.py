"""Data sets: image folders, where they come from, and the batches that workers train on.

- Building: `recipe.py` reads `datasets/`, `sources/` has a module for each kind of source, `archive.py` and
  `download.py` get at their files, `selection.py` chooses and splits images, `build.py` writes the folder.
- Using: `find.py` resolves `--dataset`, `folder.py` lists an image folder, `identity.py` says which images they are (of
  a large one from a sample), `sampling.py` says which worker sees which sample when, `loader.py` and `augment.py` make
  batches. `own.py` has data that a user's function returns, and `bad_images.py` what `--skip-bad` leaves out.
- Packed, in Parquet: `packing.py` writes, `packed.py` finds out what is at a URL, `parquet_footer.py` where its row
  groups lie, `row_groups.py` reads images of them, `kept_files.py` keeps whole files on a host.
- Looking: `commands.py` is `hvdtrain data`, with `check.py` and `contact_sheet.py`.
- `image.py` handles one encoded image, `storage.py` the cache, folders that appear complete or not at all, and work on
  many images at a time.
"""
