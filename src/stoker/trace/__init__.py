"""Any dataset: the user's own code on images and tensors that record, its pixels in native threads.

Note [Tracing]
    The user's dataset runs unchanged in torch's own worker processes. There, `Image.open` of a JPEG
    gives a lazy image (`image`): it knows its size and mode, and records what is done to it.
    `ToTensor` of one gives a deferred tensor (`tensor`): shape and dtype are right, there are no
    values. `default_collate` or `torch.stack` of such tensors is one recorded batch. What has been
    recorded until the batch is complete crosses to the main process as a few numbers per sample
    (`wire`), whose native threads decode into the batch's memory.

    Whatever looks at pixels or values gets them at once, in the worker, from the native engine;
    what the engine declines, from Pillow. If the file turns out broken, which user code would have
    noticed earlier, the batch is run again from the same random states with nothing deferred
    (`worker`). So nothing has to be guessed: what is not recorded is done by the code that always
    did it, on real pixels.
"""
