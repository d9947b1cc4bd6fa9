//! The names of blocks, for Python.

use kvasir_hash::{BlockHasher, Scope, sequence_hashes};
use kvasir_types::{LocalHash, Token};
use pyo3::prelude::*;

use crate::values;

/// Tokens from which on hashing lets other threads run Python meanwhile.
const LONG_TOKENS: usize = 1 << 15;

/// What a prompt shares a cache with.
pub(crate) fn scope<'a>(
    lora: Option<&'a str>,
    salt: Option<&'a str>,
    eagle: Option<bool>,
) -> Scope<'a> {
    Scope {
        lora: lora.unwrap_or_default(),
        salt: salt.unwrap_or_default(),
        eagle: eagle.unwrap_or(false),
    }
}

/// The names of the complete blocks of `tokens`.
pub(crate) fn block_hashes(
    py: Python<'_>,
    tokens: &[Token],
    block_size: u32,
    scope: &Scope<'_>,
) -> Vec<LocalHash> {
    let hash = || {
        let mut locals = Vec::new();
        BlockHasher::new(block_size as usize, scope).extend(tokens, &mut locals);
        locals
    };
    match tokens.len() < LONG_TOKENS {
        true => hash(),
        false => py.detach(hash),
    }
}

/// The same, with what `block_mm_infos` says of the objects in each block.
pub(crate) fn media_hashes(
    tokens: &[Token],
    block_size: u32,
    scope: &Scope<'_>,
    infos: &[Vec<u64>],
) -> Vec<LocalHash> {
    let mut locals = Vec::new();
    let media = |block: usize| infos.get(block).map_or(&[][..], Vec::as_slice);
    BlockHasher::new(block_size as usize, scope).extend_with_media(tokens, media, &mut locals);
    locals
}

/// What `block_mm_infos` says: for each block none, or `{"mm_objects": [{"mm_hash": int}, ...]}`.
pub(crate) fn media_of(infos: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<u64>>> {
    let mut blocks = Vec::new();
    for info in infos.try_iter()? {
        let info = info?;
        let mut hashes = Vec::new();
        if !info.is_none() {
            for object in info.get_item("mm_objects")?.try_iter()? {
                hashes.push(values::hash_bits(&object?.get_item("mm_hash")?)?);
            }
        }
        blocks.push(hashes);
    }
    Ok(blocks)
}

/// The names of the complete blocks of a prompt, one for each; the same names that Dynamo's router gives.
///
/// `lora_name` and `cache_namespace` keep apart what must not share a cache. `is_eagle` lets a block's window reach one token into
/// the next block. `block_mm_infos` names the images in each block.
#[pyfunction]
#[pyo3(signature = (tokens, kv_block_size, block_mm_infos=None, lora_name=None, is_eagle=None, cache_namespace=None))]
pub(crate) fn compute_block_hash_for_seq(
    py: Python<'_>,
    tokens: &Bound<'_, PyAny>,
    kv_block_size: u32,
    block_mm_infos: Option<&Bound<'_, PyAny>>,
    lora_name: Option<&str>,
    is_eagle: Option<bool>,
    cache_namespace: Option<&str>,
) -> PyResult<Vec<u64>> {
    let block_size = values::positive("kv_block_size", kv_block_size)?;
    let tokens = values::tokens(tokens)?;
    let scope = scope(lora_name, cache_namespace, is_eagle);
    let locals = match block_mm_infos {
        None => block_hashes(py, &tokens, block_size, &scope),
        Some(infos) => media_hashes(&tokens, block_size, &scope, &media_of(infos)?),
    };
    Ok(locals.into_iter().map(|hash| hash.0).collect())
}

/// The names of all prefixes that end with one of these blocks.
#[pyfunction]
pub(crate) fn compute_seq_hash_for_block(block_hashes: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let locals = values::local_hashes(block_hashes)?;
    Ok(sequence_hashes(&locals)
        .into_iter()
        .map(|hash| hash.0)
        .collect())
}

/// A number for an adapter's name, for engines that know adapters by numbers: from 1 to 2147483647, the same everywhere, and the
/// one that Dynamo gives.
#[pyfunction]
pub(crate) fn lora_name_to_id(lora_name: &str) -> u32 {
    let digest = blake3::hash(lora_name.as_bytes());
    let mut bits = [0u8; 8];
    let first = digest.as_bytes().iter();
    bits.iter_mut()
        .zip(first)
        .for_each(|(to, from)| *to = *from);
    // The lower 31 bits always fit.
    (u64::from_be_bytes(bits) as u32 & 0x7fff_ffff).max(1)
}
