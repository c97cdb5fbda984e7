//! Every error of the engine as its Python exception. The classes live here; `slipstream` re-exports them.

use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use slipstream_engine::error::EngineError;

/// The exception family, made once per interpreter.
struct Family {
    base: Py<PyType>,
    config: Py<PyType>,
    model: Py<PyType>,
    request: Py<PyType>,
    capacity: Py<PyType>,
    device: Py<PyType>,
}

static FAMILY: PyOnceLock<Family> = PyOnceLock::new();

fn new_class(py: Python<'_>, name: &str, doc: &str, bases: &Bound<'_, PyTuple>) -> PyResult<Py<PyType>> {
    let namespace = PyDict::new(py);
    namespace.set_item("__doc__", doc)?;
    namespace.set_item("__module__", "slipstream._core")?;
    let class = py.get_type::<PyType>().call1((name, bases, namespace))?;
    Ok(class.cast_into::<PyType>()?.unbind())
}

fn family(py: Python<'_>) -> PyResult<&Family> {
    FAMILY.get_or_try_init(py, || {
        let exception = PyTuple::new(py, [py.get_type::<PyException>()])?;
        let base = new_class(py, "Error", "Base of all errors of slipstream.", &exception)?;
        let plain = PyTuple::new(py, [base.bind(py)])?;
        let value = PyTuple::new(py, [base.bind(py).clone(), py.get_type::<PyValueError>()])?;
        Ok(Family {
            config: new_class(py, "ConfigError", "A setting is wrong.", &value)?,
            model: new_class(py, "ModelError", "A file or a weight is not what it should be.", &plain)?,
            request: new_class(py, "RequestError", "A request cannot be served as it is.", &value)?,
            capacity: new_class(py, "CapacityError", "Memory or K/V blocks do not suffice.", &plain)?,
            device: new_class(py, "DeviceError", "The device, or the engine itself, failed.", &plain)?,
            base,
        })
    })
}

/// Adds the classes to the module.
pub(crate) fn register(py: Python<'_>, module: &Bound<'_, PyModule>) -> PyResult<()> {
    let family = family(py)?;
    for class in [&family.base, &family.config, &family.model, &family.request, &family.capacity, &family.device] {
        module.add(class.bind(py).name()?, class.bind(py))?;
    }
    Ok(())
}

/// The exception for an error.
pub(crate) fn raise(error: &EngineError) -> PyErr {
    Python::attach(|py| {
        let family = match family(py) {
            Ok(family) => family,
            Err(error) => return error,
        };
        let class = match error {
            EngineError::Config(_) => &family.config,
            EngineError::Model(_) => &family.model,
            EngineError::Request(_) => &family.request,
            EngineError::Capacity(_) => &family.capacity,
            EngineError::Device(_) => &family.device,
        };
        PyErr::from_type(class.bind(py).clone(), error.to_string())
    })
}
