"""FP8 decode for Hopper in the CUTLASS Python DSL: the kernel, its executable model, and what builds and launches it.

Importing this package loads nothing. In reading order:

    plain     tiles, fragments, schedule, protocol, variants, arguments: shared by the kernel and its models
    kernel    decode_sm90 -> work, producer; queries, scores, values, epilogue (a consumer's steps, in order) on
              consumer, operands, barriers, ptx, traced. combine merges. They need the DSL (pagedmla[cutlass])
    numbers   model, on emulation: what the kernel computes, in numpy
    barriers  interleavings, on stage_rules and independence: every order in which the protocol can run; order: a proof
              where those are too many; both on programs
    time      timeline, on phases: the protocol played through in time; time_model: microseconds of a step
    build     build, compile (its report), on resources and usual_trip; cubin_cache
    launch    launch, on launch_checks, tensor_maps, loaded_kernel, driver

Words of these modules alone:

    tile      64 keys: a "block" of the protocol, a "unit" of the schedule (an empty request has a unit, no tile)
    segment   a tile of a request's query rows, over all of its keys
    share     units of one worker: a CTA or a cluster, which stays
    piece     what of a segment is a worker's; an item is a piece that is being worked on
    trip      one turn of a consumer's loop: it scores one tile and multiplies two
    fill      how many times a ring has been filled since the kernel began
    peak, decay, rise, gain, keep: see tiles.Shape.tail
"""
