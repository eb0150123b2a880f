"""The documented cache interface: geometry, addressing, values, quantisation and inspection. torch only.

What an engine hands over, and what it means

`values`           a step's cache on one device, and the bundle of several
`collection`       its layers, addressed through two tables
`paged_tensor`     one pool of pages, by its strides
`tables`           page ids and lengths, 32 bits on the device and int64 in addresses
`layouts`          what a row's bytes mean, and its planes as kernels see them
`quantise`         float32 to e4m3 and its scale
`convert`          rows of one layout as rows of another
`binding`          values, layout and cache that fit each other
`splits`           how executors cut a range of keys
`validation`       checks that read ids, scales and bytes

Without an engine

`page_pool`        pages for requests, and the pools that hold their bytes
`saving`           a step's cache in a file
`files`            files that are written whole or not at all

Looking at a cache

`inspection`       who owns which page, and what is wrong
`cache_report`     what comes of it
`table_findings`   faults of lengths and tables; `page_findings` those of pages
`page_contents`    digests and health of what live slots hold

`checks`           how errors are worded
"""
