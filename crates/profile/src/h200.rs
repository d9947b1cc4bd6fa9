//! Step times measured on one NVIDIA H200 (bf16, plain PyTorch, decode under CUDA graphs).
//!
//! The numbers are those of `testdata/engine-profiles/h200.json`; a test compares them, so edit neither
//! alone. Trust their shape more than their last 20 percent.

use crate::Point;

/// llama-3.1-8b: one sequence, (new tokens, tokens cached before them) to milliseconds.
#[rustfmt::skip]
pub(crate) const LLAMA_8B_PREFILL: &[Point] = &[
    Point::new(64, 0, 11.98), Point::new(64, 2048, 12.546), Point::new(64, 8192, 13.445),
    Point::new(64, 32768, 28.419), Point::new(64, 65536, 50.097),
    Point::new(256, 0, 12.035), Point::new(256, 2048, 12.911), Point::new(256, 8192, 16.701),
    Point::new(256, 32768, 40.187), Point::new(256, 65536, 71.677),
    Point::new(512, 0, 14.532), Point::new(512, 2048, 17.536), Point::new(512, 8192, 25.931),
    Point::new(512, 32768, 61.236), Point::new(512, 65536, 109.057),
    Point::new(1024, 0, 27.834), Point::new(1024, 2048, 31.907), Point::new(1024, 8192, 44.5),
    Point::new(1024, 32768, 95.917), Point::new(1024, 65536, 164.177),
    Point::new(2048, 0, 55.493), Point::new(2048, 2048, 63.286), Point::new(2048, 8192, 85.322),
    Point::new(2048, 32768, 174.291), Point::new(2048, 65536, 294.43),
    Point::new(4096, 0, 116.301), Point::new(4096, 2048, 129.437), Point::new(4096, 8192, 172.419),
    Point::new(4096, 32768, 337.844), Point::new(4096, 65536, 560.04),
    Point::new(8192, 0, 253.953), Point::new(8192, 2048, 280.943), Point::new(8192, 8192, 362.423),
    Point::new(8192, 32768, 680.889), Point::new(8192, 65536, 1112.125),
];

/// llama-3.1-8b: one step, (sequences, tokens cached for each) to milliseconds.
#[rustfmt::skip]
pub(crate) const LLAMA_8B_DECODE: &[Point] = &[
    Point::new(1, 512, 4.906), Point::new(1, 2048, 5.032), Point::new(1, 8192, 5.332),
    Point::new(1, 32768, 6.066),
    Point::new(4, 512, 5.118), Point::new(4, 2048, 5.372), Point::new(4, 8192, 6.2),
    Point::new(4, 32768, 9.193),
    Point::new(16, 512, 5.392), Point::new(16, 2048, 6.115), Point::new(16, 8192, 8.903),
    Point::new(16, 32768, 20.772),
    Point::new(32, 512, 5.937), Point::new(32, 2048, 8.269), Point::new(32, 8192, 18.151),
    Point::new(64, 512, 6.962), Point::new(64, 2048, 11.728), Point::new(64, 8192, 32.868),
    Point::new(128, 512, 9.334), Point::new(128, 2048, 19.424),
    Point::new(256, 512, 15.326), Point::new(256, 2048, 36.238),
];

/// qwen3-32b: one sequence, (new tokens, tokens cached before them) to milliseconds.
#[rustfmt::skip]
pub(crate) const QWEN_32B_PREFILL: &[Point] = &[
    Point::new(64, 0, 21.509), Point::new(64, 2048, 27.623), Point::new(64, 8192, 43.378),
    Point::new(64, 32768, 105.925), Point::new(64, 65536, 190.039),
    Point::new(256, 0, 33.684), Point::new(256, 2048, 41.758), Point::new(256, 8192, 65.217),
    Point::new(256, 32768, 160.341), Point::new(256, 65536, 290.439),
    Point::new(512, 0, 59.827), Point::new(512, 2048, 71.202), Point::new(512, 8192, 101.772),
    Point::new(512, 32768, 228.147), Point::new(512, 65536, 399.078),
    Point::new(1024, 0, 116.892), Point::new(1024, 2048, 133.008), Point::new(1024, 8192, 183.795),
    Point::new(1024, 32768, 386.561), Point::new(1024, 65536, 657.72),
    Point::new(2048, 0, 232.583), Point::new(2048, 2048, 266.468), Point::new(2048, 8192, 353.93),
    Point::new(2048, 32768, 707.922), Point::new(2048, 65536, 1186.004),
    Point::new(4096, 0, 489.332), Point::new(4096, 2048, 544.071), Point::new(4096, 8192, 708.436),
    Point::new(4096, 32768, 1372.443), Point::new(4096, 65536, 2268.873),
    Point::new(8192, 0, 1075.657), Point::new(8192, 2048, 1183.792), Point::new(8192, 8192, 1493.709),
    Point::new(8192, 32768, 2799.708), Point::new(8192, 65536, 4535.063),
];

/// qwen3-32b: one step, (sequences, tokens cached for each) to milliseconds.
#[rustfmt::skip]
pub(crate) const QWEN_32B_DECODE: &[Point] = &[
    Point::new(1, 512, 18.401), Point::new(1, 2048, 18.638), Point::new(1, 8192, 19.279),
    Point::new(1, 32768, 20.749),
    Point::new(4, 512, 18.842), Point::new(4, 2048, 19.33), Point::new(4, 8192, 20.993),
    Point::new(4, 32768, 26.93),
    Point::new(16, 512, 19.167), Point::new(16, 2048, 20.596), Point::new(16, 8192, 26.178),
    Point::new(32, 512, 20.367), Point::new(32, 2048, 25.015), Point::new(32, 8192, 44.922),
    Point::new(64, 512, 22.619), Point::new(64, 2048, 32.546),
    Point::new(128, 512, 28.413), Point::new(128, 2048, 49.056),
    Point::new(256, 512, 46.764),
];
