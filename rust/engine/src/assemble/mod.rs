//! An engine out of files: checks that everything fits together before anything large is allocated.

mod fit;
mod settings;

use std::collections::HashMap;
use std::sync::Arc;

use slipstream_kernels::cpu::Cpu;
use slipstream_kernels::{Backend, Storage};

use crate::budget::Budget;
use crate::cycle::HostCycle;
use crate::draft::{DraftModel, Drafter, Eagle, EagleWeights, NGram, NGramSettings, TreeShape};
use crate::engine::{Engine, Limits};
use crate::error::{EngineError, Result};
use crate::kv::KvManager;
use crate::load::{ChatTemplate, Checkpoint, ModelFile, Tokenizer};
use crate::model::{Decoder, DecoderWeights, FeaturePoint, ModelSpec};
use crate::request::TokenId;
use crate::sampler::Sampler;
use crate::scheduler::{Scheduler, SchedulerConfig};
use crate::text::TokenTable;
use crate::verify::TargetMatch;

pub use fit::is_same_file;
pub use settings::{Settings, TreeSettings};

use fit::{check_context, check_decoder, check_fit};
use settings::BUDGET;

/// The engine on a CPU.
pub type CpuEngine = Engine<HostCycle<Decoder<Cpu>>>;

/// K/V bytes that are taken unasked.
const DEFAULT_KV_BYTES: usize = 2 << 30;

/// A drafter to build.
pub enum DrafterFile<'a> {
    /// Prompt lookup.
    NGram(NGramSettings),
    /// A decoder.
    DraftModel {
        /// Its files; none is the target itself.
        file: Option<Box<ModelFile<'a>>>,
        /// Only its first layers.
        num_layers: Option<usize>,
        /// Its tree.
        tree: TreeSettings,
    },
    /// An EAGLE-1/2 head.
    Eagle {
        /// Its files.
        file: Checkpoint<'a>,
        /// Its tree.
        tree: TreeSettings,
    },
}

/// What was built.
pub struct Assembled {
    /// The engine.
    pub engine: CpuEngine,
    /// What it allows a request.
    pub limits: Limits,
    /// The model's tokenizer, if it came with one.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// The model's chat template, if it came with one.
    pub chat_template: Option<ChatTemplate>,
    /// Bytes of every token.
    pub table: Arc<TokenTable>,
    /// What it is.
    pub info: Info,
}

/// What an engine is made of.
#[derive(Clone, Debug)]
pub struct Info {
    /// The target.
    pub spec: ModelSpec,
    /// The drafters, by kind.
    pub drafters: Vec<String>,
    /// Bytes of target weights that a pass reads.
    pub bytes_per_pass: usize,
    /// Bytes of K/V for a token, drafters' included.
    pub kv_bytes_per_token: usize,
    /// Bytes of K/V in all.
    pub kv_bytes: usize,
    /// Compute threads.
    pub num_threads: usize,
    /// Instruction set of the kernels.
    pub instruction_set: &'static str,
}

/// A drafter whose weights are there and whose K/V is not.
enum Loaded {
    NGram(NGramSettings),
    DraftModel { weights: Arc<DecoderWeights<Cpu>>, num_layers: usize, shape: TreeShape },
    Eagle { weights: Box<EagleWeights<Cpu>>, shape: TreeShape },
}

/// Builds an engine. `progress` is told the share of the weights that is done; an error from it ends the building.
pub fn assemble(
    target: ModelFile<'_>,
    drafters: Vec<DrafterFile<'_>>,
    settings: &Settings,
    progress: &dyn Fn(f32) -> Result<()>,
) -> Result<Assembled> {
    settings.check()?;
    check_decoder(&target)?;
    check_context(settings, &target)?;
    let mut checked = Vec::with_capacity(drafters.len());
    for drafter in &drafters {
        checked.push(check_fit(drafter, &target)?);
    }
    let backend = Arc::new(Cpu::new(settings.threads, settings.isa));
    let weights = DecoderWeights::load(&*backend, target.spec.clone(), &target.tensors, settings.storage, progress)?;
    let weights = Arc::new(weights);
    let loaded: Vec<Loaded> = drafters
        .into_iter()
        .zip(checked)
        .map(|(drafter, shape)| load(&backend, &weights, drafter, shape, settings.storage, progress))
        .collect::<Result<_>>()?;

    let spec = weights.spec.clone();
    let max_context = settings.max_context.unwrap_or(spec.max_position as u32);
    let sizes = kv_sizes(&spec, &loaded, settings, max_context)?;
    let num_slots = sizes.num_blocks * settings.block_size;

    let mut built: Vec<Box<dyn Drafter<<Cpu as Backend>::Activations>>> = Vec::new();
    let mut names = Vec::new();
    let mut max_draft_nodes = 0_u16;
    let mut budget = BUDGET;
    let num_tokens = num_tokens(&spec, target.tokenizer.as_deref());
    for drafter in loaded {
        max_draft_nodes = max_draft_nodes.saturating_add(drafter.max_nodes()).min(1024);
        if drafter.is_fixed() {
            budget = Budget::UNLIMITED;
        }
        names.push(drafter.name());
        built.push(build(drafter, &backend, &weights, num_slots as usize, settings.max_batch, num_tokens)?);
    }
    let is_tapped = names.iter().any(|name| name == "eagle");
    let points = if is_tapped { vec![FeaturePoint::FinalNorm] } else { Vec::new() };
    let info = Info {
        bytes_per_pass: weights.bytes_per_pass(&backend),
        kv_bytes_per_token: sizes.bytes_per_token,
        kv_bytes: sizes.bytes_per_token * num_slots as usize,
        num_threads: backend.threads(),
        instruction_set: backend.isa().name(),
        drafters: names,
        spec: spec.clone(),
    };

    let decoder = Decoder::new(Arc::clone(&backend), weights, num_slots as usize, points)?;
    let cycle = HostCycle::new(decoder, built, Box::new(TargetMatch), budget, Sampler::new(num_tokens));
    let table = target.tokenizer.as_ref().map(|tokenizer| tokenizer.table()).unwrap_or_default();
    let config = SchedulerConfig {
        max_batch: settings.max_batch,
        max_batch_tokens: settings.max_batch_tokens,
        chunk: settings.chunk,
        max_draft_nodes,
        max_in_flight: 1,
    };
    let scheduler = Scheduler::new(config, Arc::clone(&table));
    let kv = KvManager::new(sizes.num_blocks, settings.block_size, settings.prefix_cache);
    let limits = Limits {
        max_context,
        num_slots,
        num_tokens,
        eos_token_ids: spec.eos_token_ids.iter().copied().filter(|token| *token < num_tokens).collect(),
        special_tokens: special_tokens(target.tokenizer.as_deref(), &table, num_tokens),
    };
    Ok(Assembled {
        engine: Engine::new(scheduler, kv, cycle),
        limits,
        tokenizer: target.tokenizer,
        chat_template: target.chat_template,
        table,
        info,
    })
}

/// Ids that a tokenizer gives and an embedding table holds.
fn num_tokens(spec: &ModelSpec, tokenizer: Option<&Tokenizer>) -> TokenId {
    tokenizer.map_or(spec.vocab_size, |tokenizer| tokenizer.vocab_size().min(spec.vocab_size)) as TokenId
}

fn special_tokens(tokenizer: Option<&Tokenizer>, table: &TokenTable, num_tokens: TokenId) -> HashMap<String, TokenId> {
    let Some(tokenizer) = tokenizer else {
        return HashMap::new();
    };
    (0..num_tokens)
        .filter(|token| table.special.get(*token as usize).copied().unwrap_or(false))
        .filter_map(|token| tokenizer.token_text(token).map(|text| (text.to_owned(), token)))
        .collect()
}

fn load(
    backend: &Cpu,
    target: &Arc<DecoderWeights<Cpu>>,
    drafter: DrafterFile<'_>,
    shape: Option<TreeShape>,
    storage: Storage,
    progress: &dyn Fn(f32) -> Result<()>,
) -> Result<Loaded> {
    let shape = || shape.expect("a drafter with a tree was checked for its shape");
    Ok(match drafter {
        DrafterFile::NGram(ngram) => Loaded::NGram(ngram),
        DrafterFile::DraftModel { file, num_layers, .. } => {
            let weights = match file {
                Some(file) => Arc::new(DecoderWeights::load(backend, file.spec, &file.tensors, storage, progress)?),
                None => Arc::clone(target),
            };
            let num_layers = num_layers.unwrap_or(weights.spec.num_layers);
            Loaded::DraftModel { weights, num_layers, shape: shape() }
        }
        DrafterFile::Eagle { file, .. } => {
            let weights = EagleWeights::load(backend, target, &file.config, &file.tensors, storage)?;
            Loaded::Eagle { weights: Box::new(weights), shape: shape() }
        }
    })
}

impl Loaded {
    fn name(&self) -> String {
        match self {
            Self::NGram(_) => "ngram".to_owned(),
            Self::DraftModel { .. } => "draft_model".to_owned(),
            Self::Eagle { .. } => "eagle".to_owned(),
        }
    }

    fn max_nodes(&self) -> u16 {
        match self {
            Self::NGram(ngram) => ngram.max_nodes,
            Self::DraftModel { shape, .. } | Self::Eagle { shape, .. } => shape.max_nodes,
        }
    }

    fn is_fixed(&self) -> bool {
        match self {
            Self::NGram(_) => false,
            Self::DraftModel { shape, .. } | Self::Eagle { shape, .. } => shape.budget == Budget::UNLIMITED,
        }
    }

    /// Floats of K/V for one slot, and scratch slots for one request.
    fn kv(&self) -> (usize, usize) {
        match self {
            Self::NGram(_) => (0, 0),
            Self::DraftModel { weights, num_layers, shape } => {
                (2 * num_layers * weights.spec.num_kv_heads * weights.spec.head_dim, shape.num_scratch())
            }
            Self::Eagle { weights, shape } => (2 * weights.layers.len() * weights.kv_width, shape.num_scratch()),
        }
    }
}

struct KvSizes {
    num_blocks: u32,
    bytes_per_token: usize,
}

/// How many blocks the K/V memory gives, drafters' layers and scratch included.
fn kv_sizes(spec: &ModelSpec, drafters: &[Loaded], settings: &Settings, max_context: u32) -> Result<KvSizes> {
    let float = std::mem::size_of::<f32>();
    let target = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim;
    let bytes_per_token = float * (target + drafters.iter().map(|drafter| drafter.kv().0).sum::<usize>());
    let scratch: usize =
        drafters.iter().map(Loaded::kv).map(|(floats, slots)| float * floats * slots * settings.max_batch).sum();
    let block = bytes_per_token * settings.block_size as usize;
    let blocks_per_sequence = max_context.div_ceil(settings.block_size) as usize;
    let wanted = blocks_per_sequence.saturating_mul(settings.max_batch);
    let bytes = settings.kv_cache_bytes.unwrap_or(DEFAULT_KV_BYTES.max(scratch + 16 * block));
    let num_blocks = (bytes.saturating_sub(scratch) / block).min(wanted);
    if num_blocks < 2 {
        return Err(EngineError::capacity(format!(
            "expected kv_cache_bytes of at least {} (two blocks of {} tokens at {bytes_per_token} bytes, and {scratch} \
             bytes for growing trees), got {bytes}",
            scratch + 2 * block,
            settings.block_size
        )));
    }
    let num_blocks = u32::try_from(num_blocks).unwrap_or(u32::MAX).min(u32::MAX / settings.block_size);
    Ok(KvSizes { num_blocks, bytes_per_token })
}

fn build(
    drafter: Loaded,
    backend: &Arc<Cpu>,
    target: &Arc<DecoderWeights<Cpu>>,
    num_slots: usize,
    max_batch: usize,
    num_tokens: TokenId,
) -> Result<Box<dyn Drafter<<Cpu as Backend>::Activations>>> {
    Ok(match drafter {
        Loaded::NGram(settings) => Box::new(NGram::new(settings)),
        Loaded::DraftModel { weights, num_layers, shape } => Box::new(DraftModel::new(
            Arc::clone(backend),
            weights,
            num_layers,
            shape,
            num_slots,
            max_batch,
            num_tokens,
        )?),
        Loaded::Eagle { weights, shape } => {
            Box::new(Eagle::new(Arc::clone(backend), Arc::clone(target), *weights, shape, 0, num_slots, max_batch)?)
        }
    })
}
