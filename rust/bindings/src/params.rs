//! `SamplingParams`: validated once, when it is made.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyMapping, PySequence, PyString};
use slipstream_engine::error::EngineError;
use slipstream_engine::request::SamplingParams as EngineParams;

use crate::error::raise;

/// How a request draws and when it ends.
#[pyclass(frozen, module = "slipstream._core", name = "SamplingParams")]
#[derive(Clone)]
pub(crate) struct SamplingParams {
    pub(crate) inner: EngineParams,
}

fn wrong(name: &str, expected: &str, value: &Bound<'_, PyAny>) -> PyErr {
    let shown = value.repr().map_or_else(
        |_| "something unprintable".to_owned(),
        |text| {
            let text = text.to_string();
            if text.chars().count() > 80 { text.chars().take(80).chain("...".chars()).collect() } else { text }
        },
    );
    raise(&EngineError::request(format!("expected {name} to be {expected}, got {shown}")))
}

/// A whole number; neither a bool nor a float counts as one.
fn whole(name: &str, value: &Bound<'_, PyAny>, low: u64, high: u64) -> PyResult<u64> {
    let expected = || format!("a whole number between {low} and {high}");
    if value.is_instance_of::<PyBool>() || !is_integral(value) {
        return Err(wrong(name, &expected(), value));
    }
    match value.extract::<u64>() {
        Ok(number) if (low..=high).contains(&number) => Ok(number),
        _ => Err(wrong(name, &expected(), value)),
    }
}

/// An int, or something that stands for one (NumPy's integers).
fn is_integral(value: &Bound<'_, PyAny>) -> bool {
    value.is_instance_of::<PyInt>() || value.hasattr("__index__").unwrap_or(false)
}

fn number(name: &str, value: &Bound<'_, PyAny>) -> PyResult<f32> {
    let is_number =
        value.is_instance_of::<PyFloat>() || is_integral(value) || value.hasattr("__float__").unwrap_or(false);
    if value.is_instance_of::<PyBool>() || value.is_instance_of::<PyString>() || !is_number {
        return Err(wrong(name, "a number", value));
    }
    match value.extract::<f64>() {
        Ok(number) if number.is_finite() && (number as f32).is_finite() => Ok(number as f32),
        _ => Err(wrong(name, "a finite number of 32 bits", value)),
    }
}

fn flag(name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    value.cast::<PyBool>().map(|flag| flag.is_true()).map_err(|_| wrong(name, "True or False", value))
}

fn items<'py>(name: &str, expected: &str, value: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let sequence = value.cast::<PySequence>().map_err(|_| wrong(name, expected, value))?;
    if value.is_instance_of::<PyString>() || value.is_instance_of::<PyBytes>() {
        return Err(wrong(name, expected, value));
    }
    sequence.try_iter()?.collect()
}

/// Token ids of some vocabulary. Their range is checked where the vocabulary is known.
pub(crate) fn token_ids(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let each = format!("each id in {name}");
    items(name, "a list of token ids", value)?
        .iter()
        .map(|item| Ok(whole(&each, item, 0, u64::from(u32::MAX))? as u32))
        .collect()
}

fn strings(value: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    let expected = "a string or a list of strings";
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(vec![text.extract().map_err(|_| wrong("stop", "valid unicode", value))?]);
    }
    items("stop", expected, value)?
        .iter()
        .map(|item| match item.cast::<PyString>() {
            Ok(text) => text.extract().map_err(|_| wrong("stop", "valid unicode", item)),
            Err(_) => Err(wrong("stop", expected, item)),
        })
        .collect()
}

/// Fields that are known and not built yet, each with the value that asks for nothing.
const LATER: [&str; 7] = ["logprobs", "n", "json_schema", "regex", "grammar", "prediction", "priority"];

const KNOWN: &str = "max_tokens, temperature, top_k, top_p, min_p, seed, stop, stop_token_ids, ignore_eos, min_tokens, \
                     repetition_penalty, presence_penalty, frequency_penalty, logit_bias, speculate";

fn refuse_later(name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    let is_default = match name {
        "n" => !value.is_instance_of::<PyBool>() && value.extract::<i64>().is_ok_and(|count| count == 1),
        "priority" => !value.is_instance_of::<PyBool>() && value.extract::<i64>().is_ok_and(|priority| priority == 0),
        _ => value.is_none(),
    };
    if is_default {
        return Ok(());
    }
    Err(raise(&EngineError::request(format!("expected no {name}: it is not supported yet"))))
}

fn read(params: &mut EngineParams, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    const MAX: u64 = u32::MAX as u64;
    match name {
        "max_tokens" if value.is_none() => params.max_tokens = None,
        "max_tokens" => params.max_tokens = Some(whole(name, value, 1, MAX)? as u32),
        "min_tokens" => params.min_tokens = whole(name, value, 0, MAX)? as u32,
        "temperature" => params.temperature = number(name, value)?,
        "top_k" => params.top_k = whole(name, value, 0, MAX)? as u32,
        "top_p" => params.top_p = number(name, value)?,
        "min_p" => params.min_p = number(name, value)?,
        "seed" if value.is_none() => params.seed = None,
        "seed" => params.seed = Some(whole(name, value, 0, u64::MAX)?),
        "stop" => params.stop = strings(value)?,
        "stop_token_ids" => params.stop_token_ids = token_ids(name, value)?,
        "ignore_eos" => params.ignore_eos = flag(name, value)?,
        "repetition_penalty" => params.repetition_penalty = number(name, value)?,
        "presence_penalty" => params.presence_penalty = number(name, value)?,
        "frequency_penalty" => params.frequency_penalty = number(name, value)?,
        "logit_bias" => {
            let mapping =
                value.cast::<PyMapping>().map_err(|_| wrong(name, "a mapping of token ids to numbers", value))?;
            // By id, so that equal mappings are equal parameters.
            let mut biases = BTreeMap::new();
            for pair in mapping.items()?.iter() {
                let (token, bias) = pair.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
                biases.insert(whole(name, &token, 0, MAX)? as u32, number(name, &bias)?);
            }
            params.logit_bias = biases.into_iter().collect();
        }
        "speculate" => {
            params.max_draft_nodes = match value.cast::<PyBool>() {
                Ok(flag) if flag.is_true() => None,
                Ok(_) => Some(0),
                Err(_) => Some(whole(name, value, 0, MAX)? as u32),
            };
        }
        later if LATER.contains(&later) => refuse_later(later, value)?,
        unknown => {
            return Err(raise(
                &EngineError::request(format!("expected a parameter of a request, got {unknown}"))
                    .with_hint(format!("known are {KNOWN}")),
            ));
        }
    }
    Ok(())
}

/// Every field with its value as Python writes it.
fn shown(params: &EngineParams) -> [(&'static str, String); 15] {
    fn optional<T: ToString>(value: Option<T>) -> String {
        value.map_or_else(|| "None".to_owned(), |value| value.to_string())
    }
    let flag = |is_on: bool| if is_on { "True" } else { "False" }.to_owned();
    let biases: Vec<String> = params.logit_bias.iter().map(|(token, bias)| format!("{token}: {bias:?}")).collect();
    [
        ("max_tokens", optional(params.max_tokens)),
        ("temperature", format!("{:?}", params.temperature)),
        ("top_k", params.top_k.to_string()),
        ("top_p", format!("{:?}", params.top_p)),
        ("min_p", format!("{:?}", params.min_p)),
        ("seed", optional(params.seed)),
        ("stop", format!("{:?}", params.stop)),
        ("stop_token_ids", format!("{:?}", params.stop_token_ids)),
        ("ignore_eos", flag(params.ignore_eos)),
        ("min_tokens", params.min_tokens.to_string()),
        ("repetition_penalty", format!("{:?}", params.repetition_penalty)),
        ("presence_penalty", format!("{:?}", params.presence_penalty)),
        ("frequency_penalty", format!("{:?}", params.frequency_penalty)),
        ("logit_bias", format!("{{{}}}", biases.join(", "))),
        ("speculate", params.max_draft_nodes.map_or_else(|| flag(true), |count| count.to_string())),
    ]
}

#[pymethods]
impl SamplingParams {
    #[new]
    #[pyo3(
        signature = (**params),
        text_signature = "(*, max_tokens=256, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, stop=(), \
            stop_token_ids=(), ignore_eos=False, min_tokens=0, repetition_penalty=1.0, presence_penalty=0.0, \
            frequency_penalty=0.0, logit_bias=..., logprobs=None, n=1, json_schema=None, regex=None, grammar=None, \
            prediction=None, priority=0, speculate=True)"
    )]
    fn new(params: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut inner = EngineParams::default();
        for (name, value) in params.into_iter().flatten() {
            read(&mut inner, &name.extract::<String>()?, &value)?;
        }
        // Token ids are checked against the vocabulary when the request is submitted.
        inner.validate(u32::MAX).map_err(|error| raise(&error))?;
        Ok(Self { inner })
    }

    /// Most tokens written; None is as many as the context holds.
    #[getter]
    fn max_tokens(&self) -> Option<u32> {
        self.inner.max_tokens
    }
    /// 0 takes the most probable token each time.
    #[getter]
    fn temperature(&self) -> f32 {
        self.inner.temperature
    }
    /// Keep the k most probable tokens; 0 is off.
    #[getter]
    fn top_k(&self) -> u32 {
        self.inner.top_k
    }
    /// Keep the smallest set with this probability; 1 is off.
    #[getter]
    fn top_p(&self) -> f32 {
        self.inner.top_p
    }
    /// Keep tokens with this share of the best one's probability; 0 is off.
    #[getter]
    fn min_p(&self) -> f32 {
        self.inner.min_p
    }
    /// Where the coins come from; None draws one from the system.
    #[getter]
    fn seed(&self) -> Option<u64> {
        self.inner.seed
    }
    /// Texts that end the output, and are left out of it.
    #[getter]
    fn stop(&self) -> Vec<String> {
        self.inner.stop.clone()
    }
    /// Tokens that end the output beside the model's own.
    #[getter]
    fn stop_token_ids(&self) -> Vec<u32> {
        self.inner.stop_token_ids.clone()
    }
    /// Go on past the model's tokens that end a text.
    #[getter]
    fn ignore_eos(&self) -> bool {
        self.inner.ignore_eos
    }
    /// Fewest tokens before a stop token or stop text counts.
    #[getter]
    fn min_tokens(&self) -> u32 {
        self.inner.min_tokens
    }
    /// Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
    #[getter]
    fn repetition_penalty(&self) -> f32 {
        self.inner.repetition_penalty
    }
    /// Taken from logits of tokens in the output; 0 is off.
    #[getter]
    fn presence_penalty(&self) -> f32 {
        self.inner.presence_penalty
    }
    /// Taken from logits once for each time in the output; 0 is off.
    #[getter]
    fn frequency_penalty(&self) -> f32 {
        self.inner.frequency_penalty
    }
    /// Added to single logits.
    #[getter]
    fn logit_bias(&self) -> BTreeMap<u32, f32> {
        self.inner.logit_bias.iter().copied().collect()
    }
    /// True, False, or the most draft nodes in a step.
    #[getter]
    fn speculate<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.inner.max_draft_nodes {
            None => Ok(PyBool::new(py, true).to_owned().into_any()),
            Some(0) => Ok(PyBool::new(py, false).to_owned().into_any()),
            Some(count) => Ok(count.into_pyobject(py)?.into_any()),
        }
    }

    /// What differs from the defaults.
    fn __repr__(&self) -> String {
        let (ours, defaults) = (shown(&self.inner), shown(&EngineParams::default()));
        let differing = ours.into_iter().zip(defaults).filter(|(ours, default)| ours.1 != default.1);
        let listed: Vec<String> = differing.map(|((name, value), _)| format!("{name}={value}")).collect();
        format!("SamplingParams({})", listed.join(", "))
    }
}
